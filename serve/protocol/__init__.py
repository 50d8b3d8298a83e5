"""From bytes on the wire to images, and back to replies: MLflow's scoring protocol and Open Inference v2."""
