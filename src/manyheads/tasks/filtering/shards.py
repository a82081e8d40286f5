"""Rows as Parquet: types found from the rows, and one schema for all shards in the end."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manyheads.atomic_write import atomic_write
from manyheads.errors import MissingPackageError

# A column whose values have no common type is stored as JSON, and its field says so.
JSON_MARK = {b"manyheads": b"json"}
# A row group is written once it has this many rows or bytes.
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 2**13, 2**26


def arrow() -> Any:
    """The package pyarrow."""
    try:
        import pyarrow
    except ImportError:
        raise MissingPackageError("writing Parquet", "pyarrow") from None
    return pyarrow


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
    try:
        array = pa.array(values)
        if not _has_empty_struct(array.type):
            return array, False
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        pass
    return pa.array([_as_json(value) for value in values], pa.string()), True


def _as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _has_empty_struct(kind: Any) -> bool:
    """Whether Parquet cannot hold the type, because a struct in it has no fields."""
    pa = arrow()
    if pa.types.is_struct(kind):
        return not kind.num_fields or any(_has_empty_struct(each.type) for each in kind)
    return bool(pa.types.is_list(kind)) and _has_empty_struct(kind.value_type)


def common_schema(schemas: Iterable[Any]) -> Any:
    """The schema that holds the rows of all, with the columns in the order they appear."""
    pa = arrow()
    fields: dict[str, Any] = {}
    for schema in schemas:
        for each in schema:
            mark = JSON_MARK if _is_json(each) else None
            each = each.with_nullable(True).remove_metadata().with_metadata(mark)
            known = fields.get(each.name)
            fields[each.name] = each if known is None else _common_field(known, each)
    return pa.schema(list(fields.values()))


def _common_field(one: Any, other: Any) -> Any:
    pa = arrow()
    if one.equals(other, check_metadata=True):
        return one
    marked = _is_json(one) or _is_json(other)
    nulls = pa.types.is_null(one.type) or pa.types.is_null(other.type)
    if not marked or nulls:
        try:
            promoted = pa.unify_schemas(
                [pa.schema([one]), pa.schema([other])], promote_options="permissive"
            ).field(0)
            return promoted.with_metadata(JSON_MARK if marked else None)
        except pa.ArrowException:
            pass
    return pa.field(one.name, pa.string(), metadata=JSON_MARK)


def _is_json(field: Any) -> bool:
    return bool(field.metadata) and field.metadata.get(b"manyheads") == b"json"


def cast_table(table: Any, schema: Any) -> Any:
    """The table with the columns and types of a schema that holds its rows."""
    pa = arrow()
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(len(table), field.type))
            continue
        before, column = table.schema.field(field.name), table.column(field.name)
        if before.type.equals(field.type) and _is_json(before) == _is_json(field):
            columns.append(column)
        elif _is_json(field) and not pa.types.is_null(before.type):
            values = [_as_json(value) for value in column.to_pylist()]
            columns.append(pa.chunked_array([pa.array(values, pa.string())]))
        else:
            columns.append(_cast(column, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: Any, kind: Any) -> Any:
    pa = arrow()
    try:
        return column.cast(kind)
    except pa.ArrowException:
        # Structs that gained fields.
        return pa.chunked_array([pa.array(column.to_pylist(), kind)])


def write_table(table: Any, file: Path) -> None:
    """One small Parquet file, atomically."""
    write_shard([table], table.schema, file)


def write_shard(tables: Iterable[Any], schema: Any, file: Path) -> int:
    """The tables as one Parquet file, with large row groups; returns the number of rows."""
    pa = arrow()
    import pyarrow.parquet as pq

    rows = 0
    with (
        atomic_write(file) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        for group in _row_groups(tables, schema):
            writer.write_table(pa.concat_tables(group).combine_chunks())
            rows += sum(map(len, group))
    return rows


def _row_groups(tables: Iterable[Any], schema: Any) -> Iterator[list[Any]]:
    group: list[Any] = []
    for table in tables:
        group.append(cast_table(table, schema))
        rows, size = sum(map(len, group)), sum(each.nbytes for each in group)
        if rows >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


def merge_files(parts: Sequence[Path], file: Path) -> int:
    """Several Parquet files as one, which has all their columns."""
    import pyarrow.parquet as pq

    schema = common_schema(pq.read_schema(part) for part in parts)
    return write_shard(_tables(parts), schema, file)


def unify_files(files: Sequence[Path]) -> None:
    """Give all files one schema; only those are rewritten that have another."""
    import pyarrow.parquet as pq

    schemas = [pq.read_schema(file) for file in files]
    schema = common_schema(schemas)
    for file, own in zip(files, schemas, strict=True):
        if not common_schema([own]).equals(schema, check_metadata=True):
            write_shard(_tables([file]), schema, file)


def _tables(files: Sequence[Path]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for file in files:
        with pq.ParquetFile(file, pre_buffer=False) as opened:
            for index in range(opened.num_row_groups):
                yield opened.read_row_group(index)
