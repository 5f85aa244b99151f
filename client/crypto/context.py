"""How a message was encrypted, as a program sees it: names and forms of Pulsar's Python client."""

from __future__ import annotations

from ...proto.entry_pb2 import EncryptionKeys, MessageMetadata


class EncryptionKey:
    """A reader that a message is encrypted for."""

    def __init__(self, key: EncryptionKeys) -> None:
        self._key = key

    @property
    def key(self) -> str:
        """Returns the name of the key."""
        return self._key.key

    @property
    def value(self) -> bytes:
        """The data key, wrapped with the reader's public key."""
        return self._key.value

    @property
    def metadata(self) -> dict[str, str]:
        """Returns what the producer's key reader said about the key; in clear, and not authenticated."""
        return {pair.key: pair.value for pair in self._key.metadata}


class EncryptionContext:
    """The encryption of an entry; with `ConsumerCryptoFailureAction.CONSUME`, what a program needs to decrypt it."""

    def __init__(self, metadata: MessageMetadata, *, failed: bool) -> None:
        self._metadata = metadata
        self._failed = failed

    def keys(self) -> list[EncryptionKey]:
        """The readers that it is encrypted for."""
        return [EncryptionKey(each) for each in self._metadata.encryption_keys]

    def param(self) -> bytes:
        """Returns the IV of AES-256-GCM."""
        return self._metadata.encryption_param

    def algorithm(self) -> str:
        """Returns the algorithm: empty, as Pulsar's clients write it."""
        return self._metadata.encryption_algo

    def compression_type(self) -> int:
        """Returns how the payload was compressed before it was encrypted: a number of CompressionType."""
        return int(self._metadata.compression)

    def uncompressed_message_size(self) -> int:
        """Bytes of the payload before it was compressed; 0: it was not."""
        return self._metadata.uncompressed_size

    def batch_size(self) -> int:
        """Messages in the entry; -1: it is not a batch."""
        metadata = self._metadata
        return metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else -1

    def is_decryption_failed(self) -> bool:
        """Whether the message is ciphertext; False: it is decrypted."""
        return self._failed
