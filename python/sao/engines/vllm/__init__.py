"""vLLM as an engine: `engine` in the generator, `worker` inside vLLM's own process."""
