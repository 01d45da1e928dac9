//! The socket that hands out a session's memory: who may connect to it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use xkv_session::Access;
use xkv_session::pass::Handover;

fn is_root(own: &Path) -> bool {
    std::fs::metadata(own).unwrap().uid() == 0
}

#[test]
fn the_socket_has_the_mode_and_group_asked_for_and_is_gone_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    for (mode, group) in [(0o600, None), (0o660, Some(12345)), (0o666, None)] {
        // Only root gives files to groups it is not in.
        let group = group.filter(|_| is_root(folder.path()));
        let handover = Handover::listen(folder.path(), "ab", 7, Access { mode, group }).unwrap();
        let metadata = std::fs::metadata(handover.path()).unwrap();
        assert_eq!(metadata.mode() & 0o777, mode);
        let own = std::fs::metadata(folder.path()).unwrap().gid();
        assert_eq!(metadata.gid(), group.unwrap_or(own));
        drop(handover);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_group_that_may_not_be_given_is_named() {
    let folder = tempfile::tempdir().unwrap();
    if is_root(folder.path()) {
        // Root may give a socket to any group: nothing to refuse.
        return;
    }
    let access = Access { mode: 0o660, group: Some(0) };
    let error = Handover::listen(folder.path(), "ab", 7, access).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("socket_group"), "{error}");
}
