"""The OpenAI objects: JSON in, JSON out, no HTTP.

Owns: what a request object may say and what a response object looks like. Must not know transports, nor how an answer is generated.
"""
