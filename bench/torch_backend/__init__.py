"""The backend of torch.distributed: its calls beside gloo's, and trainings that shard models."""
