//! Arrays out of NumPy's `.npz` archives, whole or row by row.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use npyz::npz::NpzArchive;
use npyz::{Deserialize, NpyFile, NpyReader, Order};

use crate::error::Error;

/// Largest array that is read whole, bytes: 20,000 requests of 48 × 128 counts in 16 bits are a fifth of it.
/// [`Npz::rows`] knows no such bound.
pub const ARRAY_BYTES_MAX: u64 = 1 << 30;
/// Largest element, bytes: a text of 65,536 characters.
const ELEMENT_BYTES_MAX: u64 = 1 << 18;
/// What the header of an array may have before its data, bytes. NumPy writes 128.
const HEADER_BYTES_MAX: usize = 64 << 10;

/// An open archive.
pub struct Npz {
    file: String,
    archive: NpzArchive<BufReader<File>>,
}

/// One array: row-major `data` of `shape`.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// The elements, the last axis varying fastest.
    pub data: Vec<T>,
}

impl<T> Array<T> {
    /// Elements of row `index` of the first axis.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, index: usize) -> &[T] {
        let row: usize = self.shape[1..].iter().product();
        &self.data[index * row..][..row]
    }
}

impl std::fmt::Debug for Npz {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Npz")
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

impl Npz {
    /// Opens the archive at `path`.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = path.display().to_string();
        let archive = NpzArchive::open(path).map_err(|error| {
            let hint = "give the path of a .npz archive as NumPy's savez writes it";
            Error::new(format!("{file}: opening the archive failed: {error}"), hint)
        })?;
        Ok(Npz { file, archive })
    }

    /// Reads the array `name`, whose elements must be of type `T`.
    pub fn array<T: Deserialize>(&mut self, name: &str) -> Result<Array<T>, Error> {
        let rows = self.rows::<T>(name)?;
        if rows.bytes > ARRAY_BYTES_MAX {
            let found = rows.bytes;
            return Err(rows.invalid(format!(
                "it has {found} bytes, at most {ARRAY_BYTES_MAX} are read"
            )));
        }
        let Rows {
            place,
            shape,
            reader,
            ..
        } = rows;
        let data = reader.collect::<Result<_, _>>();
        let data = data.map_err(|error| invalid(&place, error.to_string()))?;
        Ok(Array { shape, data })
    }

    /// Reads the array `name` like [`Npz::array`] and checks the length of every axis.
    pub fn array_of<T: Deserialize>(
        &mut self,
        name: &str,
        shape: &[usize],
    ) -> Result<Array<T>, Error> {
        self.rows::<T>(name)?.check(shape)?;
        self.array(name)
    }

    /// Opens the array `name` to be read one row of its first axis after the other, so that it may be
    /// larger than memory. To read several arrays side by side, open the archive once for each.
    pub fn rows<T: Deserialize>(&mut self, name: &str) -> Result<Rows<'_, T>, Error> {
        let place = format!("{}: array `{name}`", self.file);
        let bytes = self.checked_bytes(name, &place)?;
        let failed = |what: String| invalid(&place, what);
        let array = self.archive.by_name(name);
        let array = array.map_err(|error| failed(error.to_string()))?;
        let array = array.ok_or_else(|| failed("it is missing".into()))?;
        if array.order() != Order::C {
            return Err(failed(
                "it is in Fortran order where C order was expected".into(),
            ));
        }
        let shape: Vec<usize> = array
            .shape()
            .iter()
            .map(|&axis| usize::try_from(axis).unwrap_or(usize::MAX))
            .collect();
        let dtype = array.dtype().descr();
        let reader = array.data::<T>().map_err(|error| {
            let wanted = std::any::type_name::<T>();
            failed(format!(
                "its type is {dtype} where {wanted} was expected ({error})"
            ))
        })?;
        Ok(Rows {
            place,
            shape,
            bytes,
            reader: Box::new(reader),
        })
    }

    /// What the array's header says of its data.
    fn checked_bytes(&mut self, name: &str, place: &str) -> Result<u64, Error> {
        match self.archive.zip_archive().by_name(&format!("{name}.npy")) {
            Ok(mut entry) => data_bytes(&mut entry, place),
            // What is wrong with it is told by whoever opens it next.
            Err(_) => Ok(0),
        }
    }
}

/// How many bytes of data a `.npy` says that it has. The crate that reads arrays multiplies unchecked and
/// believes the header about its own length, so both are looked at before.
fn data_bytes(input: &mut impl Read, place: &str) -> Result<u64, Error> {
    let failed = |what: &str| invalid(place, format!("its header {what}"));
    let mut start = [0; 12];
    let read = input.read_exact(&mut start[..10]);
    read.map_err(|error| failed(&format!("cannot be read: {error}")))?;
    if &start[..6] != b"\x93NUMPY" {
        return Err(failed("is none of a .npy file"));
    }
    let length = if start[6] == 1 {
        usize::from(u16::from_le_bytes([start[8], start[9]]))
    } else {
        let read = input.read_exact(&mut start[10..]);
        read.map_err(|error| failed(&format!("cannot be read: {error}")))?;
        u32::from_le_bytes([start[8], start[9], start[10], start[11]]) as usize
    };
    if length > HEADER_BYTES_MAX {
        return Err(failed(&format!(
            "has {length} bytes, at most {HEADER_BYTES_MAX} are read"
        )));
    }
    let mut text = vec![0; length];
    let read = input.read_exact(&mut text);
    read.map_err(|error| failed(&format!("cannot be read: {error}")))?;
    let text = String::from_utf8_lossy(&text);
    let shape = text.split_once("'shape'").and_then(|(_, rest)| {
        let inside = rest.split_once('(')?.1;
        Some(inside.split_once(')')?.0)
    });
    let shape = shape.ok_or_else(|| failed("has no shape"))?;
    let axes = shape
        .split(',')
        .map(|axis| axis.trim().trim_end_matches('L'));
    let mut elements = 1u64;
    for axis in axes.filter(|axis| !axis.is_empty()) {
        let product = axis
            .parse::<u64>()
            .ok()
            .and_then(|axis| elements.checked_mul(axis));
        elements = product.ok_or_else(|| failed(&format!("has the shape ({shape})")))?;
    }
    // The size of an element stands at the end of its type: <i4, <U64 (of four bytes each).
    let dtype = text
        .split_once("'descr'")
        .map_or("", |(_, rest)| rest.trim_start_matches([':', ' ', '\'']));
    let dtype = dtype.split('\'').next().unwrap_or_default();
    let digits = dtype.trim_start_matches(|c: char| !c.is_ascii_digit());
    let width = digits
        .parse::<u64>()
        .unwrap_or(1)
        .saturating_mul(if dtype.contains('U') { 4 } else { 1 });
    if width > ELEMENT_BYTES_MAX {
        return Err(failed(&format!("has the type {dtype}")));
    }
    Ok(elements.saturating_mul(width))
}

/// A whole `.npy` file of expert ids, of one byte or two, as engines send them. `place` names it in errors.
///
/// # Errors
/// It is no such file.
pub fn expert_ids(bytes: &[u8], place: &str) -> Result<Array<u16>, Error> {
    let failed = |what: String| invalid(place, what);
    data_bytes(&mut &*bytes, place)?;
    let array = || {
        let array = NpyFile::new(bytes);
        array.map_err(|error| failed(error.to_string()))
    };
    let file = array()?;
    if file.order() != Order::C {
        return Err(failed(
            "it is in Fortran order where C order was expected".into(),
        ));
    }
    let axes = file.shape().iter();
    let shape = axes.map(|&axis| usize::try_from(axis).unwrap_or(usize::MAX));
    let shape: Vec<usize> = shape.collect();
    let dtype = file.dtype().descr();
    let data = if let Ok(reader) = file.data::<u8>() {
        reader.map(|id| id.map(u16::from)).collect()
    } else {
        let reader = array()?.data::<u16>();
        let reader = reader
            .map_err(|_| failed(format!("its type is {dtype} where u8 or u16 was expected")))?;
        reader.collect::<Result<Vec<u16>, _>>()
    };
    let data = data.map_err(|error| failed(error.to_string()))?;
    Ok(Array { shape, data })
}

/// An array that is being read row by row.
pub struct Rows<'a, T: Deserialize> {
    place: String,
    shape: Vec<usize>,
    bytes: u64,
    reader: Box<NpyReader<T, Entry<'a>>>,
}

type Entry<'a> = npyz::zip::read::ZipFile<'a>;

impl<T: Deserialize> std::fmt::Debug for Rows<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rows")
            .field("place", &self.place)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl<T: Deserialize> Rows<'_, T> {
    /// Length of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Checks the length of every axis.
    pub fn check(&self, shape: &[usize]) -> Result<(), Error> {
        if self.shape == shape {
            return Ok(());
        }
        Err(Error::new(
            format!(
                "{}: its shape is {:?} where {shape:?} was expected",
                self.place, self.shape
            ),
            "all arrays of one archive must be about the same requests",
        ))
    }

    /// Reads the next `count` elements.
    ///
    /// # Errors
    /// The archive cannot be read or the array has no more.
    pub fn take(&mut self, count: usize) -> Result<Vec<T>, Error> {
        let data: Result<Vec<T>, _> = self.reader.by_ref().take(count).collect();
        let data = data.map_err(|error| self.invalid(error.to_string()))?;
        if data.len() < count {
            return Err(self.invalid(format!("it ends {} elements early", count - data.len())));
        }
        Ok(data)
    }

    /// An error about this array.
    pub fn invalid(&self, what: String) -> Error {
        invalid(&self.place, what)
    }
}

fn invalid(place: &str, what: String) -> Error {
    let hint = "check that the archive is complete and of the kind that this command reads";
    Error::new(format!("{place}: {what}"), hint)
}
