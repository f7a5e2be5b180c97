"""Links between cores: messages at QoS 0, and shared subscriptions."""
