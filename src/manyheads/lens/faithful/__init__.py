"""Whether attention weights explain an answer: erasure, adversarial weights, gradients."""
