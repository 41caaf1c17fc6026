"""Client of the MiMo-Audio tokenizer service.

    with TokenizerClient("unix:///run/mimo.sock") as client:
        codes = client.encode(waveform, sample_rate=44100)  # (num_quantizers, frames)
        samples = client.decode(codes)  # (samples,)

`AsyncTokenizerClient` has the same methods for asyncio. `Credentials` are for a server that speaks TLS or asks for a
token. All errors are `TokenizerError`s.
"""

from ._aio import AsyncTokenizerClient
from ._credentials import Credentials
from ._sync import TokenizerClient
from ._version import __version__
from .errors import (
    AuthenticationFailed,
    Cancelled,
    DeadlineExceeded,
    ErrorDetail,
    InvalidInput,
    ModelMismatch,
    Overloaded,
    ServerFault,
    ServiceUnavailable,
    TokenizerError,
    TooLarge,
)
from .info import DeviceInfo, Limits, ModelInfo, ServerInfo

__all__ = [
    "AsyncTokenizerClient",
    "AuthenticationFailed",
    "Cancelled",
    "Credentials",
    "DeadlineExceeded",
    "DeviceInfo",
    "ErrorDetail",
    "InvalidInput",
    "Limits",
    "ModelInfo",
    "ModelMismatch",
    "Overloaded",
    "ServerFault",
    "ServerInfo",
    "ServiceUnavailable",
    "TokenizerClient",
    "TokenizerError",
    "TooLarge",
    "__version__",
]
