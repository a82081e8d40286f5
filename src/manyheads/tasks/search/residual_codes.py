"""Vectors of tokens in a few bytes: the nearest centroid, and 2 bits per channel of the rest.

As in ColBERTv2 and PLAID (arXiv 2112.01488, 2205.09707).
"""

from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from manyheads.argument_checks import checked
from manyheads.atomic_write import atomic_write, write_tensors
from manyheads.encoding.late_scores import score_rows
from manyheads.errors import InputError
from manyheads.progress import Progress
from manyheads.ragged import Ragged

BITS = 2
BUCKETS = 2**BITS
PER_BYTE = 8 // BITS
# A centroid's number takes two bytes.
NUMBER_BYTES = 2
MAX_CENTROIDS = 2 ** (8 * NUMBER_BYTES)
# Vectors that k-means and the buckets are learned from, iterations, and rows compared at a time.
SAMPLE = 2**15
PER_CENTROID = 16
ITERATIONS = 4
ROWS = 4096
NAMES = ("centroids", "cutoffs", "weights", "normalized")


@dataclass(frozen=True, slots=True, eq=False)
class ResidualCodec:
    """Encodes vectors as rows of bytes, and decodes them.

    A row is the number of the nearest centroid in two bytes, and 2 bits per channel: in which
    quarter of that channel's residuals it lies. `weights` are the values that the quarters stand
    for. Decoded vectors have length 1 if those that the codec was trained on had.
    """

    centroids: Float[Tensor, "k c"]
    cutoffs: Float[Tensor, "c 3"]
    weights: Float[Tensor, "c 4"]
    normalized: bool = True

    @property
    def width(self) -> int:
        """The number of channels of a vector."""
        return self.centroids.shape[1]

    @property
    def row_bytes(self) -> int:
        """The number of bytes of an encoded vector."""
        return NUMBER_BYTES + -(-self.width // PER_BYTE)

    def encode(self, vectors: Float[Tensor, "n c"]) -> UInt8[Tensor, "n b"]:
        """One row of bytes per vector."""
        if vectors.dim() != 2 or vectors.shape[1] != self.width:
            raise InputError(
                f"the codec is for vectors of {self.width} channels, got {tuple(vectors.shape)}",
                "encode with the model that it was trained for",
            )
        blocks = vectors.to(self.device).split(ROWS)
        return torch.cat([self._encode(block.float()) for block in blocks])

    def decode(self, rows: UInt8[Tensor, "n b"]) -> Float[Tensor, "n c"]:
        """The vectors that rows of bytes stand for, nearly those that were encoded."""
        if rows.dim() != 2 or rows.shape[1] != self.row_bytes or rows.dtype != torch.uint8:
            raise InputError(
                f"the codec has rows of {self.row_bytes} bytes, got {tuple(rows.shape)} of "
                f"{rows.dtype}",
                "use the rows that this codec encoded",
            )
        return self._decode(rows, self._table())

    def _decode(self, rows: UInt8[Tensor, "n b"], table: Tensor) -> Float[Tensor, "n c"]:
        number = rows[:, 0].int() + 256 * rows[:, 1].int()
        packed = rows[:, NUMBER_BYTES:].int()
        packed += 256 * torch.arange(packed.shape[1], dtype=torch.int32, device=rows.device)
        residual = F.embedding(packed, table).flatten(1)[:, : self.width]
        vectors = F.embedding(number, self.centroids) + residual
        return F.normalize(vectors, dim=-1) if self.normalized else vectors

    def _encode(self, vectors: Float[Tensor, "n c"]) -> UInt8[Tensor, "n b"]:
        number = nearest(vectors, self.centroids)
        residual = vectors - self.centroids[number]
        bucket = (residual.unsqueeze(-1) > self.cutoffs).sum(-1)
        bucket = F.pad(bucket, (0, -self.width % PER_BYTE))
        places = BUCKETS ** torch.arange(PER_BYTE, device=vectors.device)
        packed = (rearrange(bucket, "n (b p) -> n b p", p=PER_BYTE) * places).sum(-1)
        head = torch.stack([number % 256, number // 256], dim=1)
        return torch.cat([head, packed], dim=1).to(torch.uint8)

    def _table(self) -> Float[Tensor, "bytes 4"]:
        """What each byte at each place stands for."""
        byte = torch.arange(256, device=self.device)
        places = BUCKETS ** torch.arange(PER_BYTE, device=self.device)
        bucket = byte.unsqueeze(1) // places % BUCKETS
        weights = F.pad(self.weights, (0, 0, 0, -self.width % PER_BYTE))
        by_byte = rearrange(weights, "(b p) v -> b p v", p=PER_BYTE)
        channel = torch.arange(PER_BYTE, device=self.device)
        return by_byte[:, channel, bucket].flatten(0, 1)

    @property
    def device(self) -> torch.device:
        return self.centroids.device

    def to(self, device: torch.device | str) -> "ResidualCodec":
        """The same codec on a device."""
        centroids, cutoffs = self.centroids.to(device), self.cutoffs.to(device)
        return ResidualCodec(centroids, cutoffs, self.weights.to(device), self.normalized)

    def save(self, file: str | Path) -> None:
        """Write the codec as .safetensors; `load` restores it."""
        values = (self.centroids, self.cutoffs, self.weights, torch.tensor(self.normalized))
        tensors = {
            name: value.cpu().contiguous() for name, value in zip(NAMES, values, strict=True)
        }
        with atomic_write(Path(file)) as temporary:
            write_tensors(tensors, temporary)

    @classmethod
    def load(cls, file: str | Path) -> "ResidualCodec":
        """Read a codec that `save` wrote."""
        try:
            tensors = load_file(file)
            centroids, cutoffs, weights, normalized = (tensors[name] for name in NAMES)
        except (SafetensorError, KeyError) as error:
            raise InputError(
                f"{file} is not a codec of residuals ({error})", "create the index again"
            ) from None
        return cls(centroids, cutoffs, weights, bool(normalized))


@dataclass(frozen=True, slots=True, eq=False)
class ResidualCodes:
    """Encoded vectors of documents, which are scored without decoding all of them at once.

    >>> vectors = Ragged.from_list([torch.eye(8)[:5], torch.eye(8)[5:]])
    >>> codes = ResidualCodes.of(vectors, progress=False)
    >>> len(codes), codes.codec.row_bytes, int(codes.score(torch.eye(8)[6:7]).argmax())
    (2, 4, 1)
    """

    codec: ResidualCodec
    rows: Ragged

    @classmethod
    def of(
        cls, vectors: Ragged, codec: ResidualCodec | None = None, *, progress: bool = True
    ) -> "ResidualCodes":
        """Encode the vectors of documents, by a codec that is trained on them if none is given."""
        codec = codec or train_codec(vectors.values, progress=progress)
        return cls(codec, vectors.to(codec.device).map(codec.encode))

    def __len__(self) -> int:
        return len(self.rows)

    def score(self, query: Float[Tensor, "q c"]) -> Float[Tensor, " d"]:
        """MaxSim of each document, as `maxsim` of the decoded vectors."""
        table, codes = self.codec._table(), self.rows.values
        return score_rows(
            query.to(self.codec.device),
            self.rows.lengths,
            lambda rows: self.codec._decode(codes[rows], table),
        )

    def decode(self) -> Ragged:
        """All vectors, nearly those that were encoded."""
        return self.rows.map(self.codec.decode)


@checked
def train_codec(
    vectors: Float[Tensor, "n c"],
    *,
    centroids: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> ResidualCodec:
    """Learn centroids by k-means, and quarters of the residuals in each channel.

    By default the number of centroids is the power of two below 8 times the square root of the
    number of vectors, and no more than one per 8 vectors.
    """
    count = vectors.shape[0]
    if not count or vectors.dim() != 2:
        raise InputError(
            f"a codec is trained on vectors in rows, got shape {tuple(vectors.shape)}",
            "give at least one",
        )
    if centroids is None:
        centroids = min(1 << (8 * isqrt(count)).bit_length() - 1, max(count // 8, 1))
        centroids = min(centroids, MAX_CENTROIDS)
    if not 1 <= centroids <= min(count, MAX_CENTROIDS):
        raise InputError(
            f"centroids must be in 1 to {min(count, MAX_CENTROIDS)}, got {centroids}",
            f"use at most one per vector and {MAX_CENTROIDS}",
        )
    generator = torch.Generator().manual_seed(seed)
    most = max(SAMPLE, PER_CENTROID * centroids)
    chosen = torch.randperm(count, generator=generator)[:most].to(vectors.device)
    sample = vectors[chosen].float()
    normalized = bool(((sample.norm(dim=-1) - 1).abs() < 1e-2).all())
    means = k_means(sample, centroids, spherical=normalized, generator=generator, progress=progress)
    residual = sample - means[nearest(sample, means)]
    # Where each quarter of a channel's residuals ends, and its mean.
    ascending = residual[:SAMPLE].sort(0).values
    rows = ascending.shape[0]
    ends = [rows * bucket // BUCKETS for bucket in range(BUCKETS + 1)]
    # A quarter without rows stands for the row where it would be.
    quarters = [ascending[min(a, rows - 1) : max(b, a + 1)] for a, b in pairwise(ends)]
    inner = [min(max(end, 1), rows - 1) for end in ends[1:-1]]
    cutoffs = (ascending[[end - 1 for end in inner]] + ascending[inner]) / 2
    weights = torch.stack([quarter.mean(0) for quarter in quarters])
    return ResidualCodec(means, cutoffs.T.contiguous(), weights.T.contiguous(), normalized)


def k_means(
    vectors: Float[Tensor, "n c"],
    count: int,
    *,
    spherical: bool = True,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Float[Tensor, "k c"]:
    """Centroids that are the means of the vectors nearest to them, of length 1 if `spherical`."""
    drawn = torch.randperm(vectors.shape[0], generator=generator)[:count].to(vectors.device)
    means = vectors[drawn].clone()
    with Progress("k-means", total=ITERATIONS, unit="steps", enabled=progress) as bar:
        for _ in range(ITERATIONS):
            owner = nearest(vectors, means)
            members = owner.bincount(minlength=count)
            sums = torch.zeros_like(means).index_add_(0, owner, vectors)
            # A centroid without vectors moves to a random one.
            lone = (members == 0).nonzero().squeeze(1)
            drawn = torch.randint(vectors.shape[0], (len(lone),), generator=generator)
            sums[lone] = vectors[drawn.to(vectors.device)]
            means = sums / members.clamp(min=1).unsqueeze(1)
            means = F.normalize(means, dim=-1) if spherical else means
            bar.advance(1)
    return means


def nearest(vectors: Float[Tensor, "n c"], means: Float[Tensor, "k c"]) -> Int[Tensor, " n"]:
    """The number of the centroid nearest to each vector."""
    offset = means.square().sum(1) / 2
    return torch.cat([(block @ means.T - offset).argmax(1) for block in vectors.split(ROWS)])
