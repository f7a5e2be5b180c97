"""The Spark sink `mqtt`: options, rows as PUBLISH packets, and a client that publishes them."""
