"""Envelopes from engines, decoded: all at once, or what can be read of them. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from aioshm.engine.protocol.messages import MarkedOutputs, is_finished, request_id_of
from aioshm.engine.protocol.payloads import Frame, PayloadDecoder
from aioshm.errors import CodecError, RequestFailed


class Failure(NamedTuple):
    """An output that cannot be read as what it should be."""

    request_id: str  # whose output it is
    text: str  # why, for people; what the engine says, if it says that the request has failed
    finished: bool  # whether it is the last one
    generation: int | None = None  # the generation of its request; None if the engine sends none

    def raising(self, engine: int) -> Callable[[], RequestFailed]:
        """Return what makes the error that says so."""
        return lambda: RequestFailed(self.text, engine=engine, request_id=self.request_id)


class EnvelopeDecoder:
    """Decodes envelopes."""

    def __init__(self, output_type: Any = None) -> None:
        self._type = output_type
        generic: Any = MarkedOutputs  # or the type checker takes what is in the brackets for a type
        self._outputs = PayloadDecoder(generic[Any if output_type is None else output_type])
        self._any = PayloadDecoder(MarkedOutputs[Any])
        self._one = PayloadDecoder(output_type)
        self._raw = PayloadDecoder(MarkedOutputs[msgspec.Raw])
        self.decode: Callable[[Sequence[Frame]], Any] = self._outputs.decode

    def salvage(self, frames: list[Frame]) -> tuple[MarkedOutputs[Any], list[Failure]]:
        """Return an envelope with those of its outputs that can be read, and what is wrong with the others."""
        envelope = self._raw.decode(frames)
        parts = list(frames)
        readable: list[Any] = []
        generations: list[int] = []
        failures: list[Failure] = []
        for raw, plain, generation in zip(
            envelope.outputs, self._any.decode(frames).outputs, generations_of(envelope), strict=True
        ):
            try:
                parts[0] = bytes(raw)
                readable.append(self._one.decode(parts))
                if generation is not None:
                    generations.append(generation)
            except CodecError as error:
                try:
                    request_id = request_id_of(plain)
                except CodecError:
                    continue  # nobody's
                says = plain.get("error") if type(plain) is dict else None
                text = says if isinstance(says, str) else f"its output is no {self._type}: {error}"
                failures.append(Failure(request_id, text, is_finished(plain), generation))
        envelope.outputs = readable
        if envelope.generations is not None:
            envelope.generations = generations
        return envelope, failures


def generations_of(envelope: MarkedOutputs[Any]) -> Sequence[int | None]:
    """Return the generation of each output of an envelope; None for each where the engine sends none."""
    if envelope.generations is None:
        return [None] * len(envelope.outputs)
    if len(envelope.generations) != len(envelope.outputs):
        raise CodecError(f"{len(envelope.generations)} generations for {len(envelope.outputs)} outputs")
    return envelope.generations
