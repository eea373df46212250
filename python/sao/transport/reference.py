"""What names the weights of a policy version."""

from sao.transport.messages import WeightsRef

__all__ = ["WeightsRef"]
