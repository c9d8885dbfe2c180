// Elements from texts: nothing that a model writes is ever read as HTML.

/** An element with properties and children, which may be texts. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** The element of this page with an id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Shows a problem above everything; hides it where there is none. */
export function notify(message) {
  const notice = byId("notice");
  notice.textContent = message;
  notice.hidden = !message;
}
