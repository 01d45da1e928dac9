//! A gateway in this process that can be stopped and started again on the same drives and port.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use xkv_plugin::{ClientConfig, Config, Gateway};
use xkv_session::GatewayConfig;
use xkv_store::{Store, StoreConfig};

use super::{Device, store_config};

/// Short, so that tests need not wait; clients must wait at least twice as long.
const HEARTBEAT: Duration = Duration::from_millis(50);
/// Time between attempts to open a session.
const REOPEN: Duration = Duration::from_millis(100);

pub struct Rig {
    pub drives: Vec<Arc<dyn Device>>,
    pub store_config: StoreConfig,
    pub config: GatewayConfig,
    pub folder: tempfile::TempDir,
    gateway: Option<xkv_session::Gateway>,
}

impl Rig {
    pub fn on(drives: &[Arc<dyn Device>]) -> Self {
        let mut rig = Self::stopped(drives);
        rig.start();
        rig
    }

    /// One whose gateway is not running yet, but whose port is known.
    pub fn stopped(drives: &[Arc<dyn Device>]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let config = GatewayConfig {
            listen: vec![free.local_addr().expect("bound")],
            shm_dir: folder.path().into(),
            heartbeat: HEARTBEAT,
            client_silence: Duration::from_secs(5),
            ..GatewayConfig::default()
        };
        Self { drives: drives.to_vec(), store_config: store_config(), config, folder, gateway: None }
    }

    pub fn start(&mut self) {
        assert!(self.gateway.is_none(), "it runs");
        let store = Store::open_on(self.drives.clone(), &self.store_config).expect("the store opens");
        let gateway = xkv_session::Gateway::start(store, self.config.clone());
        self.gateway = Some(gateway.expect("the gateway starts"));
    }

    pub fn stop(&mut self) {
        let mut gateway = self.gateway.take().expect("it runs");
        gateway.close(Duration::from_secs(5));
    }

    pub fn address(&self) -> SocketAddr {
        self.config.listen[0]
    }

    pub fn status(&self) -> Value {
        serde_json::to_value(self.gateway.as_ref().expect("it runs").status()).expect("plain data")
    }

    pub fn client_config(&self, slots: u32, config: &Config) -> ClientConfig {
        ClientConfig {
            host: self.address().ip().to_string(),
            port: self.address().port(),
            shm_dir: self.folder.path().into(),
            token: self.config.token.clone(),
            name: "test".into(),
            slots,
            fragment_bytes: None,
            silence: config.wait_timeout,
            flush_patience: config.store_deadline,
        }
    }

    pub fn backend(&self, slots: u32, config: &Config) -> xkv_plugin::Result<Gateway> {
        Gateway::open(self.client_config(slots, config), REOPEN)
    }
}
