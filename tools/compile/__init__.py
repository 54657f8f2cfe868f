"""From a model and a deployment to the compiler's door: plan, files, page, hand-over."""
