//! Python's buffers as the connector's.

use std::ptr::NonNull;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use xkv_plugin::{L1Buffer, Owner};

/// The memory of each of `views`, of any element type; none where it is in pieces, no buffer at all, or read-only where
/// it is to be `filled`. The owner keeps it exported until it is dropped, under the interpreter lock.
pub fn export(views: &[Bound<'_, PyAny>], filled: bool) -> (Vec<Option<L1Buffer>>, Owner) {
    let held: Vec<Option<PyUntypedBuffer>> =
        views.iter().map(|view| PyUntypedBuffer::get(view).ok()).collect();
    let guarded = held
        .iter()
        .map(|view| {
            let view = view.as_ref().filter(|view| view.is_c_contiguous() && !(filled && view.readonly()))?;
            let address = NonNull::new(view.buf_ptr().cast::<u8>()).unwrap_or(NonNull::dangling());
            let len = if view.buf_ptr().is_null() { 0 } else { view.len_bytes() };
            // SAFETY: a contiguous buffer has `len` bytes at its address, exported until the owner is dropped. The
            // connector gives the owner back with the answer, and closes the buffer before that.
            Some(unsafe { L1Buffer::new(address, len) })
        })
        .collect();
    (guarded, Box::new(held))
}
