"""The parts of the Spark source `mqtt`: options, offsets, planning, storage and payload parsing."""
