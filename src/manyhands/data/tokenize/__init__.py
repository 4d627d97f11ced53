"""From messages to a token store: tokenizers, processes side by side, the cache, the summary."""
