"""An HTTP server with OpenAI's endpoints on the engine."""
