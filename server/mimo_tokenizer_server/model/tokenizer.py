"""The whole tokenizer: mel frames to codes and codes to sound, items packed one after the other or one step by step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .config import TokenizerConfig
from .decoder import Decoder
from .encoder import Encoder
from .frontend import MelFrontEnd
from .packing import Spans
from .rows import set_tile_rows
from .transformer import Transformer


class MiMoAudioTokenizer(nn.Module):
    """Encoder, quantizer and decoder on one device; inference only.

    Items are packed: rows of one after those of another, without padding, and each gets the answer it gets alone, up
    to the rounding of sums whose order a batch's size can change.

    Args:
        config: the checkpoint's.
        device: where the weights are allocated, uninitialized: `checkpoint` fills them.
        dtype: of the weights, but for the quantizer's and the ISTFT window, which stay float32.
        tile_rows: rows that a product is given at once, for an answer with the same bits in every batch; None for
            all there are, which is faster.

    Raises:
        ValueError: `tile_rows` is less than 1.
    """

    def __init__(
        self, config: TokenizerConfig, device: torch.device, dtype: torch.dtype, *, tile_rows: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.device = device
        self.dtype = dtype
        with torch.device("meta"):
            self.encoder = Encoder(config)
            self.decoder = Decoder(config)
        self.to(dtype)
        self.encoder.quantizer.to(torch.float32)
        self.decoder.vocoder.head.window.data = self.decoder.vocoder.head.window.data.float()
        self.to_empty(device=device)
        self.requires_grad_(False).eval()
        set_tile_rows(self, tile_rows)
        for module in self.modules():
            if isinstance(module, Transformer):
                module.one_by_one = tile_rows is not None
        self.mel = MelFrontEnd(config, device)

    def encode(self, mel: Tensor, spans: Spans, num_quantizers: int) -> Tensor:
        """Codes of packed segments.

        Args:
            mel: log mel frames (spans.total, n_mels), float32.
            spans: the items' mel frames; each item is one segment and gives at least one code frame.
            num_quantizers: codebooks to use, counted from the first.

        Returns:
            int64 (num_quantizers, code frames), `config.code_frames` of each item's length, in order.
        """
        return self.encoder.encode(mel, spans, num_quantizers)

    def decode_vq(self, codes: Tensor, spans: Spans, books: Sequence[int] | Tensor | None = None) -> Tensor:
        """Sum of the codes' codebook vectors.

        Args:
            codes: integers (num_quantizers, spans.total), each within its codebook.
            spans: the items' code frames.
            books: codebooks that each item uses, counted from the first, numbers or int64 (items,) on the device; its
                codes for the others are ignored. None for all the rows given.

        Returns:
            float32 (spans.total, d_model).
        """
        return self.encoder.quantizer.decode(codes, spans, books)

    def decode(self, codes: Tensor, spans: Spans, books: Sequence[int] | None = None) -> Tensor:
        """Waveforms of packed items, one after the other.

        Args:
            codes: as for `decode_vq`.
            spans: as for `decode_vq`.
            books: as for `decode_vq`.

        Returns:
            float32 samples; of an item, frames * config.samples_per_frame - config.samples_cut.
        """
        waveform: Tensor = self.decoder(self.decode_vq(codes, spans, books), spans)
        return waveform

    def encode_steps(self, mel: Tensor, num_quantizers: int, flops: float) -> Generator[float, None, Tensor]:
        """`encode` of one segment, with little memory beside one layer's activations; may be closed at any step.

        Args:
            mel: log mel frames (mel frames, n_mels), float32.
            num_quantizers: codebooks to use, counted from the first.
            flops: floating-point operations of a step, about and at most; but a step is at least one row.

        Yields:
            The floating-point operations of each step, `encode_flops` of them in all where all codebooks are used.

        Returns:
            int64 (num_quantizers, code frames).
        """
        return self.encoder.steps(mel, num_quantizers, flops)

    def decode_steps(self, codes: Tensor, flops: float) -> Generator[float, None, Tensor]:
        """`decode` of one item, with little memory beside one layer's activations; may be closed at any step.

        Args:
            codes: integers (num_quantizers, frames), each within its codebook.
            flops: floating-point operations of a step, about and at most; but a step is at least one row.

        Yields:
            The floating-point operations of each step, `decode_flops` of them in all.

        Returns:
            float32 (frames * config.samples_per_frame - config.samples_cut,).
        """
        quantizer = self.encoder.quantizer
        return self.decoder.steps(lambda start, stop: quantizer.decode(codes[:, start:stop]), codes.shape[1], flops)

    @contextmanager
    def shallow(self, layers: int | None) -> Iterator[None]:
        """For as long as the body runs, with fewer layers: what one takes of memory, the next one takes again.

        Args:
            layers: of each transformer at the most, but for those up to the encoder's skip and two more; None for all.
        """
        stacks = [(module, module.layers) for module in self.modules() if isinstance(module, Transformer)]
        try:
            for module, whole in stacks:
                most = max(layers or len(whole), self.encoder.least_layers if module is self.encoder else 1)
                module.layers = whole[:most]
            yield
        finally:
            for module, whole in stacks:
                module.layers = whole

    def encode_flops(self, mel_frames: int) -> float:
        """Floating-point operations that one segment takes: products and attention to what is seen."""
        return self.encoder.flops(mel_frames)

    def decode_flops(self, frames: int) -> float:
        """Floating-point operations that one item takes: products and attention to what is seen."""
        return self.decoder.flops(frames)
