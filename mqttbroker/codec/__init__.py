"""The codec: packets, properties and reason codes as bytes, and back."""
