"""Topic names, topic filters and two indexes of them (MQTT 5.0 sections 4.7 and 4.8).

The package imports only the standard library.
"""
