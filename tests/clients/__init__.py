"""`make clients`: the test suites of MQTT clients, run against this broker and against Mosquitto."""
