"""Chat prompts for measuring. No prompt of one list is in another, so that nothing is judged on what it was fitted to.

All are open-ended: a 135M model answers them at length, and a check needs tokens to have power.
"""

from __future__ import annotations

DEMO = (
    "Describe a walk through an old harbour town at dawn.",
    "Explain to a child why the sky changes colour in the evening.",
    "What should somebody think about before adopting a dog?",
    "Tell a short story about a lighthouse keeper who finds a letter.",
    "How does a bicycle stay upright while it is moving?",
    "Give advice to a student who has trouble concentrating.",
    "Describe how bread is made, from the field to the table.",
    "What makes a good leader? Explain with an example.",
    "Write about a day in the life of a mountain rescue team.",
    "Why do people collect things such as stamps or coins?",
    "Explain how rivers shape the land over thousands of years.",
    "Imagine a library under the sea and describe it.",
)

CALIBRATION = (
    "Tell me about the history of tea.",
    "How do birds find their way when they migrate?",
    "Describe the perfect breakfast and how to prepare it.",
    "What are the advantages of learning a second language?",
    "Write a short story about a clockmaker and a thief.",
    "Explain how a refrigerator keeps food cold.",
    "Give tips for growing tomatoes on a balcony.",
    "What happened during the industrial revolution?",
    "Describe a thunderstorm as seen from a small boat.",
    "Why is sleep important for the brain?",
    "How can a town reduce traffic without banning cars?",
    "Write a letter from a traveller to a friend at home.",
    "Explain what inflation is and whom it hurts.",
    "Describe how a bee colony works.",
    "What is the difference between weather and climate?",
    "Tell a story about two neighbours and a fence.",
    "How does one prepare for a long hike?",
    "Explain the rules of chess to a beginner.",
    "What makes a song memorable?",
    "Describe the work of an archaeologist.",
    "How did people navigate before maps were common?",
    "Write about a robot that learns to paint.",
    "Why do leaves change colour in autumn?",
    "Discuss whether homework helps children learn.",
    "Describe a market square in the middle of winter.",
    "How are bridges built across wide rivers?",
    "Give advice for a first job interview.",
    "Explain how vaccines protect people.",
    "What would a city look like without electricity?",
    "Tell the story of a violin that passes through many hands.",
    "How do volcanoes form, and why do they erupt?",
    "Describe how a newspaper is made.",
)
