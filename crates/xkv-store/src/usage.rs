//! What is in a store, by namespace and model.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use crate::key::ObjectKey;
use crate::recency;
use crate::{Listing, Store};

/// The objects of one model in one namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Its namespace.
    pub namespace: Vec<u8>,
    /// The model, as LMCache's keys begin with it.
    pub model: Vec<u8>,
    /// Objects present.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Slots they take.
    pub slots: u64,
    /// Of the objects, those never read since they were written. Reads of the seconds before a crash are forgotten.
    pub never_read: u64,
    /// Bytes of those.
    pub never_read_bytes: u64,
    /// When the object that was used longest ago was stored or last read, microseconds since 1970.
    pub oldest_use_us: u64,
    /// The same of the one used last.
    pub newest_use_us: u64,
}

/// The model that a key of LMCache's begins with: everything before the first `@`. The whole key of others.
pub fn model_of(key: &[u8]) -> &[u8] {
    key.split(|&byte| byte == b'@').next().unwrap_or(key)
}

/// Microseconds since 1970, now.
pub fn now_us() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64)
}

impl Store {
    /// What is in the store. In memory; takes a moment with many objects.
    pub fn list(&self) -> Listing {
        let inner = &self.0.inner;
        Listing {
            store: self.id(),
            fragment_bytes: inner.fragment_bytes as u32,
            slots_total: inner.allocator.slots() as u64,
            usage: self.usage(),
        }
    }

    fn usage(&self) -> Vec<Usage> {
        let mut count = Count::default();
        let Ok(()) = self.0.inner.index.for_each_shard::<Infallible>(|entries| {
            for entry in &entries {
                let slots = entry.slots.numbers().len();
                count.add(&entry.key, entry.size, slots, entry.recency.load(Ordering::Relaxed));
            }
            Ok(())
        });
        count.sorted()
    }
}

/// Adds objects up.
#[derive(Default)]
pub(crate) struct Count(HashMap<Vec<u8>, HashMap<Vec<u8>, Usage>>);

impl Count {
    pub(crate) fn add(&mut self, key: &ObjectKey, size: u64, slots: usize, recency: u64) {
        let (namespace, model) = (key.namespace(), model_of(key.key()));
        // Looked for before a key is made: there are few of them and very many objects.
        if !self.0.get(namespace).is_some_and(|models| models.contains_key(model)) {
            let empty = Usage {
                namespace: namespace.to_vec(),
                model: model.to_vec(),
                objects: 0,
                bytes: 0,
                slots: 0,
                never_read: 0,
                never_read_bytes: 0,
                oldest_use_us: u64::MAX,
                newest_use_us: 0,
            };
            self.0.entry(namespace.to_vec()).or_default().insert(model.to_vec(), empty);
        }
        let Some(usage) = self.0.get_mut(namespace).and_then(|models| models.get_mut(model)) else { return };
        usage.objects += 1;
        usage.bytes += size;
        usage.slots += slots as u64;
        if !recency::is_read(recency) {
            usage.never_read += 1;
            usage.never_read_bytes += size;
        }
        let at = recency::micros(recency);
        usage.oldest_use_us = usage.oldest_use_us.min(at);
        usage.newest_use_us = usage.newest_use_us.max(at);
    }

    /// Most bytes first.
    pub(crate) fn sorted(self) -> Vec<Usage> {
        let mut all: Vec<Usage> = self.0.into_values().flat_map(HashMap::into_values).collect();
        all.sort_by(|a, b| {
            b.bytes.cmp(&a.bytes).then_with(|| (&a.namespace, &a.model).cmp(&(&b.namespace, &b.model)))
        });
        all
    }
}

/// Which objects are meant; a field that is not given means all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Of this namespace.
    pub namespace: Option<Vec<u8>>,
    /// Of this model.
    pub model: Option<Vec<u8>>,
}

impl Selection {
    /// Whether the object is meant.
    pub fn has(&self, key: &ObjectKey) -> bool {
        self.namespace.as_deref().is_none_or(|namespace| namespace == key.namespace())
            && self.model.as_deref().is_none_or(|model| model == model_of(key.key()))
    }
}
