//! Log lines on stderr, `[xkv-lmcache] <time> <level> <text>`, set up once per process.

use std::fmt;
use std::sync::Once;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, SubscriberBuilder};
use tracing_subscriber::registry::LookupSpan;

struct Prefixed;

impl<S, N> FormatEvent<S, N> for Prefixed
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "[xkv-lmcache] ")?;
        SystemTime.format_time(&mut writer)?;
        write!(writer, " {} ", event.metadata().level())?;
        ctx.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// Installs it, at the level that `XKV_LOG` names (error, warn, info, debug, trace; default info).
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let level = std::env::var("XKV_LOG").ok().and_then(|name| name.parse().ok()).unwrap_or(Level::INFO);
        // Another extension of this process may have installed its own: then that one gets the lines.
        let _ = tracing::subscriber::set_global_default(
            SubscriberBuilder::default()
                .with_max_level(level)
                .with_writer(std::io::stderr)
                .event_format(Prefixed)
                .finish(),
        );
    });
}
