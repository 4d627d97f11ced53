"""What is known of other tools' run files: one file for each tool whose files are read, and ``hints``, for messages.

A dialect maps the keys of one tool to ours, or refuses them with a reason; it knows our schema and reads no data.
"""
