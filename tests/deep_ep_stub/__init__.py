"""A stand-in for the `deep_ep` package: DeepEP's and HybridEP's buffers, on gloo's all-to-all."""
