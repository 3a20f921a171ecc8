"""Hugging Face folders: read into the devices' shards, and written from them."""
