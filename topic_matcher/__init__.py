"""Topic names, topic filters and the two indexes built on them (MQTT 5.0 section 4.7, 4.8).

The rule: this package knows topics and nothing else; it imports the standard library only.
"""
