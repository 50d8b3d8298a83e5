"""What computes logits: eager torch, torch.compile, ONNX Runtime. Chosen by a bundle's card."""
