"""Model architectures, one file per `model_type` of config.json, and the loader that fills them."""
