"""Chat templates: rendering conversations, and which tokens of them are trained."""
