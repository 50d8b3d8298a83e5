"""The endpoint over a registered model, and the packaging of a bundle as an MLflow model."""
