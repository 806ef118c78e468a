//! Centroid blobs in shared data: one thread publishes, all others pick up a newer revision at their tick.

use crate::shared::Shared;

fn revision_key(name: &str) -> String {
    format!("eldr.revision.{name}")
}

fn blob_key(name: &str) -> String {
    format!("eldr.blob.{name}")
}

/// Publishes a verified blob. The revision is written last, so who sees it finds the bytes.
pub fn publish(shared: &impl Shared, name: &str, revision: u64, blob: &[u8]) {
    let key = revision_key(name);
    if read_revision(shared, &key) == Some(revision) {
        return; // another thread was first
    }
    shared.set(&blob_key(name), blob, None);
    shared.set(&key, &revision.to_le_bytes(), None);
}

/// The published blob with its revision, if that is above `than`.
pub fn newer(shared: &impl Shared, name: &str, than: Option<u64>) -> Option<(u64, Vec<u8>)> {
    let published = read_revision(shared, &revision_key(name))?;
    if than.is_some_and(|than| published <= than) {
        return None;
    }
    Some((published, shared.get(&blob_key(name)).0?))
}

fn read_revision(shared: &impl Shared, key: &str) -> Option<u64> {
    let (value, _) = shared.get(key);
    Some(u64::from_le_bytes(value?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::memory::Memory;

    #[test]
    fn only_a_newer_revision_is_picked_up() {
        let shared = Memory::default();
        assert_eq!(newer(&shared, "m", None), None);
        publish(&shared, "m", 3, b"three");
        assert_eq!(newer(&shared, "m", None), Some((3, b"three".to_vec())));
        assert_eq!(newer(&shared, "m", Some(2)), Some((3, b"three".to_vec())));
        assert_eq!(newer(&shared, "m", Some(3)), None);
        assert_eq!(newer(&shared, "other", None), None);
    }
}
