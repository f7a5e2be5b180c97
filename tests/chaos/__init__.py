"""`make chaos`: clients that die and a broker that is killed, and a verdict on what was acknowledged."""
