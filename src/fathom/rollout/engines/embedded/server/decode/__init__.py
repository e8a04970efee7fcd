"""From running sequences to their next tokens: slots, prefixes, the model's forward, sampling."""
