//! Data that all threads of a gateway share: Envoy's shared data, behind a trait so that tests can be the host.

/// Key-value store with compare-and-swap, as proxy-wasm has it.
pub trait Shared {
    /// Value and version of a key; no version when the key does not exist.
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>);

    /// Writes a value; with a version only if the key still has it. True if written.
    ///
    /// On a key that does not exist the host ignores the version, so two writers could both succeed:
    /// [`create`](Self::create) it first.
    fn set(&self, key: &str, value: &[u8], version: Option<u32>) -> bool;

    /// Creates a key with an empty value unless it exists.
    ///
    /// A version that no key has makes the host refuse whenever the key exists.
    fn create(&self, key: &str) {
        self.set(key, &[], Some(u32::MAX));
    }
}

#[cfg(test)]
pub(crate) mod memory {
    use std::cell::{Cell, RefCell};
    use std::collections::HashMap;

    use super::Shared;

    /// The host's semantics, in memory.
    #[derive(Default)]
    pub(crate) struct Memory {
        entries: RefCell<HashMap<String, (Vec<u8>, u32)>>,
        versions: Cell<u32>,
    }

    impl Shared for Memory {
        fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
            match self.entries.borrow().get(key) {
                // The SDK gives no value for an empty one.
                Some((value, version)) if value.is_empty() => (None, Some(*version)),
                Some((value, version)) => (Some(value.clone()), Some(*version)),
                None => (None, None),
            }
        }

        fn set(&self, key: &str, value: &[u8], version: Option<u32>) -> bool {
            let mut entries = self.entries.borrow_mut();
            if let (Some((_, current)), Some(version)) = (entries.get(key), version)
                && *current != version
            {
                return false;
            }
            self.versions.set(self.versions.get() + 1);
            entries.insert(key.to_owned(), (value.to_vec(), self.versions.get()));
            true
        }
    }
}
