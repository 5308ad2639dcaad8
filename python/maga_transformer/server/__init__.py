"""The HTTP server: RTP-LLM's raw route, OpenAI's routes, health and metrics over one Runtime."""
