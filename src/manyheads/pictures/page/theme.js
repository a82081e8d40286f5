// The light and the dark theme: the system decides until the reader has chosen.

const KEY = "manyheads-theme";

function choose(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "☀" : "☾";
}

// Calls `changed` after the button of the toolbar has changed the theme.
export function startThemes(changed) {
  const wished = window.matchMedia("(prefers-color-scheme: dark)");
  let kept = null;
  try {
    kept = localStorage.getItem(KEY);
  } catch {
    // Without storage the system decides each time.
  }
  choose(kept ?? (wished.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    choose(next);
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // As above.
    }
    changed();
  });
}
