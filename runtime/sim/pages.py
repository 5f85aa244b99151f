"""The content of a simulated file: sparse pages, so that a zero-filled gigabyte costs nothing."""

from __future__ import annotations

from collections.abc import ItemsView

PAGE_BYTES = 4096
_ZEROS = bytes(PAGE_BYTES)


class Pages:
    """The content of a file, bytes 0..size, in pages; pages of zeros only are not kept."""

    __slots__ = ("_pages", "size")

    def __init__(self, size: int = 0, pages: dict[int, bytes] | None = None) -> None:
        self.size = size
        self._pages: dict[int, bytes] = {} if pages is None else pages

    def copy(self) -> Pages:
        return Pages(self.size, dict(self._pages))

    def numbered(self) -> ItemsView[int, bytes]:
        """Returns (number, content) of every page that is not all zeros."""
        return self._pages.items()

    def read(self, size: int, offset: int) -> bytes:
        end = min(offset + size, self.size)
        if end <= offset:
            return b""
        first, last = offset // PAGE_BYTES, (end - 1) // PAGE_BYTES
        if first == last:
            start = offset - first * PAGE_BYTES
            return self._pages.get(first, _ZEROS)[start : start + end - offset]
        joined = b"".join([self._pages.get(number, _ZEROS) for number in range(first, last + 1)])
        start = offset - first * PAGE_BYTES
        return joined[start : start + end - offset]

    def write(self, data: bytes, offset: int) -> None:
        position = 0
        while position < len(data):
            number, start = divmod(offset + position, PAGE_BYTES)
            chunk = data[position : position + PAGE_BYTES - start]
            position += len(chunk)
            if len(chunk) < PAGE_BYTES:
                page = self._pages.get(number, _ZEROS)
                chunk = page[:start] + chunk + page[start + len(chunk) :]
            if chunk == _ZEROS:
                self._pages.pop(number, None)
            else:
                self._pages[number] = chunk
        self.size = max(self.size, offset + len(data))

    def resize(self, size: int) -> None:
        """Truncates the file, or extends it with zeros."""
        if size < self.size:
            number, start = divmod(size, PAGE_BYTES)
            for page in [page for page in self._pages if page > number or (page == number and start == 0)]:
                del self._pages[page]
            if start and number in self._pages:
                kept = self._pages[number][:start] + bytes(PAGE_BYTES - start)
                self._pages[number] = kept
        self.size = size
