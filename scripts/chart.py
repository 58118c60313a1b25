"""`make chart`: generates parts of chart/ and deploy/ from the manifests and the settings. Tests compare them."""

from scripts import chart_deploy, chart_manifests, chart_values


def main() -> None:
    for part in (chart_values, chart_manifests, chart_deploy):  # each reads the files of the previous ones
        for path, text in part.written().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main()
