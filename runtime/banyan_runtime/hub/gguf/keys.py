"""Typed reads of the keys of a GGUF file's own architecture, with errors that name the file and the key."""

from __future__ import annotations

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf.header import Fields, StoredTensor


class Keys:
    """The keys of a file's own architecture, by their names behind its prefix."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.architecture = fields.text("general.architecture")

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        return self.fields.has(self.name(key))

    def number(self, key: str, default: float | None = None) -> float:
        return self.fields.number(self.name(key), default)

    def text(self, key: str, default: str) -> str:
        return self.fields.text(self.name(key), default)

    def size(self, key: str, default: int | None = None) -> int:
        """A number that is the same in all layers."""
        found = self.sizes(key, default)
        if len(set(found)) > 1:
            raise self.error(key, "one number; layers that differ in it are not supported for this architecture")
        return found[0]

    def sizes(self, key: str, default: int | None = None) -> list[int]:
        """Of each layer: the file has a list, or one number for all."""
        layers = self.fields.size(self.name("block_count"))
        value = self.fields.header.fields.get(self.name(key))
        if not isinstance(value, list):
            return [self.fields.size(self.name(key), default)] * layers
        if len(value) != layers or any(type(each) is not int or each < 1 for each in value):
            raise self.error(key, f"{layers} positive whole numbers, one for each layer")
        return value

    def layer_types(self, every: int) -> list[str]:
        """As the file lists them, or else each `every`th layer is full and the others have windows."""
        key, layers = "attention.sliding_window_pattern", self.size("block_count")
        pattern = self.fields.header.fields.get(self.name(key), every)
        if type(pattern) is int and 0 <= pattern <= layers + every:
            pattern = [not pattern or index % pattern < pattern - 1 for index in range(layers)]
        if not isinstance(pattern, list) or len(pattern) != layers or not all(each in (0, 1) for each in pattern):
            raise self.error(key, f"a number, or a list of {layers} truths")
        return [("sliding" if each else "full") + "_attention" for each in pattern]

    @property
    def window(self) -> int | None:
        """0 in a file stands for none."""
        key = self.name("attention.sliding_window")
        return self.fields.size(key) if self.fields.header.fields.get(key) else None

    @property
    def head_dim(self) -> int:
        heads, hidden = self.size("attention.head_count"), self.size("embedding_length")
        return self.size("attention.key_length", max(1, hidden // heads))

    def tensor(self, name: str) -> StoredTensor | None:
        return self.fields.header.tensors.get(name)

    def error(self, key: str, form: str) -> ModelError:
        value = self.fields.header.fields.get(self.name(key))
        return ModelError(f"{self.fields.where}: '{self.name(key)}' is {shown(value)}, not {form}; this kind of file is not supported")
