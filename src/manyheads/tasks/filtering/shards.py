"""Rows as Parquet: types inferred from the rows, and one schema for all shards in the end."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from manyheads.atomic_write import atomic_write
from manyheads.errors import import_package

# A column whose values have no common type is stored as JSON, and its field says so.
JSON_MARK = {b"manyheads": b"json"}
# A row group is written once it has this many rows or bytes.
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 2**13, 2**26


def arrow() -> Any:
    """The package pyarrow."""
    return import_package("pyarrow", "writing Parquet", "pyarrow")


def table_of_rows(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A table of rows, with the columns that any of them has."""
    pa = arrow()
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [_array([row.get(name) for row in rows]) for name in names]
    schema = pa.schema(
        [
            pa.field(name, array.type, metadata=JSON_MARK if as_json else None)
            for name, (array, as_json) in zip(names, columns, strict=True)
        ]
    )
    return pa.Table.from_arrays([array for array, _ in columns], schema=schema)


def _array(values: list[Any]) -> tuple[Any, bool]:
    """The values with the type they have in common, or as JSON."""
    pa = arrow()
    with suppress(pa.ArrowException, OverflowError, ValueError, TypeError):
        array = pa.array(values)
        if not _has_empty_struct(array.type):
            return array, False
    return pa.array([_as_json(value) for value in values], pa.string()), True


def _as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _has_empty_struct(kind: Any) -> bool:
    """Whether Parquet cannot hold the type, because a struct in it has no fields."""
    pa = arrow()
    if pa.types.is_struct(kind):
        return not kind.num_fields or any(_has_empty_struct(field.type) for field in kind)
    return bool(pa.types.is_list(kind)) and _has_empty_struct(kind.value_type)


def common_schema(schemas: Iterable[Any]) -> Any:
    """The schema that holds the rows of all, with the columns in the order they appear."""
    pa = arrow()
    columns: dict[str, list[Any]] = {}
    for schema in schemas:
        for field in schema:
            columns.setdefault(field.name, []).append(field)
    common = {name: pa.field(name, pa.string(), metadata=JSON_MARK) for name in columns}
    for name, fields in columns.items():
        marks = {_is_json(field) for field in fields if not pa.types.is_null(field.type)}
        if len(marks) < 2:
            single = [pa.schema([pa.field(name, field.type)]) for field in fields]
            with suppress(pa.ArrowException):
                unified = pa.unify_schemas(single, promote_options="permissive").field(0)
                common[name] = unified.with_metadata(JSON_MARK if True in marks else None)
    return pa.schema(list(common.values()))


def _is_json(field: Any) -> bool:
    return bool(field.metadata) and field.metadata.get(b"manyheads") == b"json"


def cast_table(table: Any, schema: Any) -> Any:
    """The table with the columns and types of a schema that holds its rows."""
    pa = arrow()
    for index, field in enumerate(table.schema):
        if _is_json(schema.field(field.name)) and not _is_json(field):
            values = [_as_json(value) for value in table.column(index).to_pylist()]
            table = table.set_column(index, field.name, pa.array(values, pa.string()))
    # Promotes the types, and adds the columns that the table does not have.
    return pa.concat_tables([schema.empty_table(), table], promote_options="permissive")


def write_shard(tables: Iterable[Any], schema: Any, file: Path) -> None:
    """The tables as one Parquet file, atomically and with large row groups."""
    pa = arrow()
    import pyarrow.parquet as pq

    group: list[Any] = []
    with (
        atomic_write(file) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        for table in chain(tables, [None]):
            if table is not None:
                group.append(cast_table(table, schema))
            rows, size = sum(map(len, group)), sum(part.nbytes for part in group)
            full = rows >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES
            if full or (group and table is None):
                writer.write_table(pa.concat_tables(group).combine_chunks())
                group = []


def merge_files(parts: Sequence[Path], file: Path) -> None:
    """Several Parquet files as one, which has all their columns."""
    import pyarrow.parquet as pq

    schema = common_schema(pq.read_schema(part) for part in parts)
    write_shard(_tables(parts), schema, file)


def unify_files(files: Sequence[Path], folder: Path) -> Iterator[tuple[Path, Path]]:
    """Those files that lack the schema of all, each with a copy in `folder` that has it."""
    import pyarrow.parquet as pq

    schemas = [pq.read_schema(file) for file in files]
    schema = common_schema(schemas)
    for file, own in zip(files, schemas, strict=True):
        if not common_schema([own]).equals(schema, check_metadata=True):
            write_shard(_tables([file]), schema, folder / file.name)
            yield file, folder / file.name


def _tables(files: Sequence[Path]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for file in files:
        with pq.ParquetFile(file, pre_buffer=False) as opened:
            for index in range(opened.num_row_groups):
                yield opened.read_row_group(index)
