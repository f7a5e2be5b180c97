"""`make abuse`: kinds of abuse against a broker process, beside well-behaved clients."""
