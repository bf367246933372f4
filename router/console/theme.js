// Light or dark before anything is drawn: what was chosen here, else what the system says.
(function () {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem("baton-theme");
  } catch {
    // storage is blocked: the choice holds until the page is left
  }
  function apply() {
    const dark = chosen ? chosen === "dark" : system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.dispatchEvent(new Event("themechange"));
  }
  system.addEventListener("change", apply);
  document.addEventListener("toggletheme", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("baton-theme", chosen);
    } catch {
      // as above
    }
    apply();
  });
  apply();
})();
