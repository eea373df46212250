"""Programs of others as agents: the OpenAI-compatible endpoint and its sessions."""
