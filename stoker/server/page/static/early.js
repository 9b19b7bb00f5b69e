// Before the first paint: the theme that was chosen, so that a dark room stays dark.
try {
  const { theme } = JSON.parse(localStorage.getItem("stoker.settings")) || {};
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Nothing kept, or not allowed: as the system says.
}
