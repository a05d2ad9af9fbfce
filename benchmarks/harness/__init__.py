"""What every benchmark shares, so that each says only what it measures.

config      options from a YAML file, each of which the command line overrides
plan        what will be run, in which order, and about how long it takes (`--dry-run`)
progress    how far a run is, and its time left
machine     what it ran on, and whether others used that meanwhile
usage       what processes and the GPU use
rows        raw rows on disk, whose presence says what need not be measured again
metadata    `metadata.json`
statistics  medians and quantiles with bootstrap intervals
markdown    tables
figures     plots, as PNG and SVG
report      `countersign bench report DIR`: everything that is made from rows, made again
"""
