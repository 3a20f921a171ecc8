"""GGUF files (llama.cpp) as Hugging Face folders."""
