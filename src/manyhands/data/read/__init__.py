"""From a source of the configuration to messages: files, hub datasets, columns, chat formats."""
