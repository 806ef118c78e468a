//! Arrays out of NumPy's `.npz` archives.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use npyz::npz::NpzArchive;
use npyz::{Deserialize, Order};

use crate::error::Error;

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
        let place = format!("{}: array `{name}`", self.file);
        let invalid = |what: String| {
            let hint = "check that the archive is of the kind that this command reads";
            Error::new(format!("{place}: {what}"), hint)
        };
        let array = self
            .archive
            .by_name(name)
            .map_err(|error| invalid(error.to_string()))?;
        let array = array.ok_or_else(|| invalid("it is missing".into()))?;
        if array.order() != Order::C {
            return Err(invalid(
                "it is in Fortran order where C order was expected".into(),
            ));
        }
        let shape: Vec<usize> = array
            .shape()
            .iter()
            .map(|&axis| usize::try_from(axis).unwrap_or(usize::MAX))
            .collect();
        let dtype = array.dtype().descr();
        let elements = array.data::<T>().map_err(|error| {
            let wanted = std::any::type_name::<T>();
            invalid(format!(
                "its type is {dtype} where {wanted} was expected ({error})"
            ))
        })?;
        let data: Vec<T> = elements
            .collect::<Result<_, _>>()
            .map_err(|error| invalid(error.to_string()))?;
        Ok(Array { shape, data })
    }

    /// Reads the array `name` like [`Npz::array`] and checks the length of every axis.
    pub fn array_of<T: Deserialize>(
        &mut self,
        name: &str,
        shape: &[usize],
    ) -> Result<Array<T>, Error> {
        let array = self.array(name)?;
        if array.shape != shape {
            let found = &array.shape;
            return Err(Error::new(
                format!(
                    "{}: array `{name}`: its shape is {found:?} where {shape:?} was expected",
                    self.file
                ),
                "all arrays of one archive must be about the same requests",
            ));
        }
        Ok(array)
    }
}
