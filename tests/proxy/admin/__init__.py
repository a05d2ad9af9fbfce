"""The admin API, and settings that are followed."""
