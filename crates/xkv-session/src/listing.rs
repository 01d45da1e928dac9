//! What is in a store, as JSON for people and programs.

use serde_json::{Value, json};
use xkv_store::Listing;
use xkv_store::usage::now_us;

/// The listing with at most `most` entries of `usage`; the rest is counted in `left_out`. Ages are `time_us` less the
/// times of the entries.
pub fn json_of(listing: &Listing, most: usize) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let usage: Vec<Value> = (listing.usage.iter().take(most))
        .map(|each| {
            json!({
                "namespace": text(&each.namespace),
                "model": text(&each.model),
                "objects": each.objects,
                "bytes": each.bytes,
                "slots": each.slots,
                "never_read": each.never_read,
                "never_read_bytes": each.never_read_bytes,
                "oldest_use_us": each.oldest_use_us,
                "newest_use_us": each.newest_use_us,
            })
        })
        .collect();
    json!({
        "store": listing.store,
        "fragment_bytes": listing.fragment_bytes,
        "slots_total": listing.slots_total,
        "time_us": now_us(),
        "left_out": listing.usage.len() - usage.len(),
        "usage": usage,
    })
}
